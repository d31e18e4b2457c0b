"""The manager's side of recovery.

The state of a job, the moves that change it, and the table of which event calls for which move.
"""
