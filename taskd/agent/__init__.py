"""Node shell: lives in the torchrun process, starts, watches and replaces the workers of one node.

No torch.
"""
