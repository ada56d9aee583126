"""The sandbox and the grader alone: run programs that nobody trusts; grade them by hidden tests.

    python -m examples.grading

Four answers to one task: a right one, a wrong one, one that loops for ever, and one whose result
claims to equal everything. Expected values never reach the process that runs the answer.
"""

from rl_code.environment.grader import grade
from rl_code.environment.sandbox.config import SandboxConfig
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.types import Case, Tests

TESTS = Tests(
    cases=(Case(args=(3,), expected=9), Case(args=(-2,), expected=4)),
    code=("assert square(0.5) == 0.25",),
)
ANSWERS = {
    "right": "def square(x):\n    return x * x\n",
    "wrong": "def square(x):\n    return x + x\n",
    "endless": "def square(x):\n    while True:\n        pass\n",
    "liar": """
class Everything(float):
    def __eq__(self, other):
        return True

def square(x):
    return Everything(0)
""",
}
CONFIG = SandboxConfig(workers=1, memory_mb=256, processes=16, workspace_mb=8, cpu_s=20)


def main() -> dict[str, tuple[bool, ...]]:
    passed = {}
    with SandboxPool(CONFIG) as pool:
        with pool.open(
            {"hello.py": "import os\nprint('hello from user', os.getuid())\n"}
        ) as sandbox:
            print(sandbox.run(["python3", "hello.py"], timeout_s=10).stdout, end="")
        for name, text in ANSWERS.items():
            result = grade("answer.py", "square", TESTS, {"answer.py": text}, pool, timeout_s=2)
            passed[name] = result.passed
            print(f"{name}: passed {result.passed}, noticed {result.flags}")
            for error in filter(None, result.errors):
                print(f"    {error}")
    return passed


if __name__ == "__main__":
    main()
