"""Settings of every test process, and of the processes that it starts."""

import os
import signal

# OpenMP threads spin while they wait, unless the policy is passive. Several test processes share the processors, so
# spinning threads take time from working ones. OpenMP reads the variable when torch is imported, which is later.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A job in the background of a shell ignores Ctrl-C, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
