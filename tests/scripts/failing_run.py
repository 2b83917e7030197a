"""Run by torchrun: train_enwik8.py with a rank 1 that is given another setting, or that raises."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train_enwik8 as script

if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    is_odd = os.environ["RANK"] == "1"
    if kind == "mismatch" and is_odd:
        arguments += ["--lr", "0.5"]
    elif kind == "raise" and is_odd:
        usual = script.learning_rate

        def learning_rate(cfg, step):
            if step == 5:
                raise RuntimeError("the fan has stopped")
            return usual(cfg, step)

        script.learning_rate = learning_rate
    sys.exit(script.main(arguments))
