"""Checkpoints on disk.

Written in parts by many ranks, published in one step, and verified before anything of them is used.
"""
