"""A job small enough to be taken through everything that can happen to it.

The two real machines, with a small model of all the rest. A `State` (state) is a value: two that
are equal go on alike. `Rules.moves` (rules) says what can happen next in one.

    rules       what can happen next, faults among it; the beginning
    nodes       agents and manager: what they hear and do; channels; time
    workers     what a training process does
    machines    the two real machines and their messages, by number
    state       what all of it is made of, as values

What is as in reality:

- each node and the manager are joined by a channel in each direction that keeps the order; nothing
  is said of the order between channels;
- a worker obeys its agent in order, and speaks, raises, dies or goes on at any moment before that;
- a collective is passed by each of its ranks at a moment of its own, once all have come, even if
  some have died since;
- a process is reaped, and a gap in a channel is noticed, at any later moment.

What is simpler:

- deadlines come last: time passes only when nothing is left that can happen without it, and then by
  as much as the earliest of them needs;
- what a worker says reaches its agent at once (that it is late looks the same: the agent's commands
  wait for the worker);
- a worker that waits obeys at once; peers of a dead rank notice that at most `Scope.breaks` times;
- a manager that is killed is there again at once, and all that was on its way is lost with it.
"""
