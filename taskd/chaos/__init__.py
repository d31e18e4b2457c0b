"""`python -m taskd.chaos -- COMMAND`: a schedule of faults into a job of the user, and a verdict.

Looks at the job from outside, by what TaskD shows of every job: its logs and records, and the black
boxes of its workers in /proc. Nothing else of TaskD imports it.
"""
