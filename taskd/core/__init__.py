"""Decisions as pure code: events in, commands out.

No clock, socket, file, thread, torch or zmq in here.
"""
