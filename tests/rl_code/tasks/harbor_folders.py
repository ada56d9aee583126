"""A folder of a task in Harbor's format, made for tests."""

from __future__ import annotations

from pathlib import Path

from tests.rl_code.tasks import projects

TEST_SH = """#!/bin/bash
python -m pytest -q -p no:cacheprovider /tests/test_outputs.py
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
SUM = {
    "instruction.md": "<!-- canary 1234 -->\n\nWrite the sum of /data/numbers.txt into total.txt, and "
    "remove old.txt.\n",
    "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 60\n'
    '[agent]\ntimeout_sec = 30.0\n[solution.env]\nEND = "\\n"\n',
    "environment/Dockerfile": "FROM python:3.12\n# the data\nWORKDIR /app\n"
    'COPY ["data", "/data"]\nCOPY --chown=1:1 old.txt ./\n',
    "environment/data/numbers.txt": "1\n2\n",
    "environment/old.txt": "old\n",
    "solution/solve.sh": 'awk \'{s += $1} END {printf "%d%s", s, ENVIRON["END"]}\' '
    "/data/numbers.txt > total.txt\nrm old.txt\n",
    "tests/test.sh": TEST_SH,
    "tests/test_outputs.py": (
        "from pathlib import Path\n\n\ndef test_total():\n"
        "    assert Path('/app/total.txt').read_text() == '3\\n'\n\n\n"
        "def test_old():\n    assert not Path('old.txt').exists()\n\n\n"
        "def test_data():\n    assert Path('/data/numbers.txt').read_text() == '1\\n2\\n'\n"
    ),
}

# A task of code, whose tests import the work.
DOUBLE = {
    "instruction.md": "double(x) in double.py must return twice its argument.\n",
    "task.toml": 'version = "1.0"\n',
    "environment/Dockerfile": "FROM python:3.12\nWORKDIR /app\nCOPY double.py .\n",
    "environment/double.py": "def double(x):\n    return x\n",
    "solution/solve.sh": "sed -i 's/return x/return 2 * x/' double.py\n",
    "tests/test.sh": TEST_SH,
    "tests/test_outputs.py": (
        "import sys\n\nsys.path.insert(0, '/app')\nfrom double import double\n\n\n"
        "def test_small():\n    assert double(21) == 42\n\n\n"
        "def test_large():\n    assert double(1730) == 3460\n\n\n"
        "def test_other():\n    assert double(-37) == -74\n"
    ),
}


def write(folder: Path, files: dict[str, str], **changes: str | None) -> Path:
    """Writes a folder; changes by path with "/" as "__", None to leave a file out."""
    changed = files | {name.replace("__", "/"): text for name, text in changes.items()}
    projects.write(folder, {path: text for path, text in changed.items() if text is not None})
    return folder
