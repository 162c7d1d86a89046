"""A siege of a running server: attackers on one side, a well-behaved client beside them, which must notice nothing.

    __main__.py  arguments, one run, exit status          attackers.py  the process that attacks: loops, pace, log
    fortress.py  the server and core under siege          attack.py     what an attack is and what it may use
    client.py    the well-behaved client, its waits       values.py     random values of any type, right and wrong
    watcher.py   memory and life of the processes         bodies.py, raw_http.py, slow.py, greedy.py, grammars.py,
    report.py    figures and verdict                      templates.py, responses.py, combined.py, frames.py,
    media_files.py  files that are bombs                  pictures.py: the attackers

Every attack is a function of (seed, attacker, number), so that a list of these repeats it.
"""
