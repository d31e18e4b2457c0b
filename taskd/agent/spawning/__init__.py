"""Starting, signalling and reaping the processes of workers."""
