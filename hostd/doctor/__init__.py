"""`doctor`: what on this node would break the promise, as data.

`kinds/` is the table of everything it can find (the page docs/doctor.md is made from it); `facts.py` reads the node,
each fact once and bounded in time; `node`, `driver`, `devices`, `containers`, `hooks` and `product` hold one small
check function per concern; `runner.py` runs them one after the other, each in a helper process with a deadline.
"""
