"""Stands in for the trainer in tests of the launchers: `python -m tests.repository.fake_trainer FOLDER BEHAVIOUR`.

Every rank writes `ready-<rank>` to FOLDER, leaves a child in a session of its own behind (pid in `orphan-<rank>`),
then does what BEHAVIOUR says.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

folder, behaviour = Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])
asked_to_end: list[int] = []


def _record(number: int, frame: object) -> None:
    asked_to_end.append(number)


for _number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(_number, _record)
orphan = subprocess.Popen(["sleep", "300"], start_new_session=True)
(folder / f"orphan-{rank}").write_text(str(orphan.pid))
(folder / f"ready-{rank}").write_text(str(os.getpid()))

if behaviour == "rank_1_fails" and rank == 1:
    time.sleep(0.5)
    sys.exit(3)
if behaviour == "success":
    sys.exit(0)
if behaviour == "refused":
    sys.exit(1)

deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    time.sleep(0.05)
    if asked_to_end and behaviour != "never_ends":
        time.sleep(1.0)  # the step that is finished and saved first
        (folder / f"saved-{rank}").write_text(signal.Signals(asked_to_end[0]).name)
        sys.exit(5)
sys.exit(9)
