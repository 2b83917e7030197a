"""Run by torchrun: train_enwik8.py with a rank 1 that fails, in the ways of a list such as
"data,kill": each start of the processes in the next one."""

import os
import signal
import sys
import time

import train_enwik8 as script


def fail(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as torchrun ends a process that hangs
    time.sleep(600)


if __name__ == "__main__":
    script.draw = lambda *_: None  # a plot takes as long as the training
    kinds, *arguments = sys.argv[1:]
    kind = dict(enumerate(kinds.split(","))).get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    is_odd = os.environ["RANK"] == "1"
    if kind == "data" and is_odd:
        load = script.load_data
        script.load_data = lambda which: (which, load(which)[1][1:])
    elif kind is not None and is_odd:
        usual = script.learning_rate

        def learning_rate(cfg, step):
            if step == 5:
                fail(kind)
            return usual(cfg, step)

        script.learning_rate = learning_rate
    sys.exit(script.main(arguments))
