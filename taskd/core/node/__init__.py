"""The agent's side of recovery: what one node does about its own workers.

`state` is the node as plain data, `machine` has the table of which event calls for which move.
"""

from taskd.core.node.machine import NodeMachine as NodeMachine
