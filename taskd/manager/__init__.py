"""The shell around the recovery machine on node 0: one loop, one socket, no torch."""
