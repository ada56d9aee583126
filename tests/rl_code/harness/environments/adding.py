"""A server of one tool, which ``sums`` starts where its tasks have tools."""

import verifiers.v1 as vf


class Adding(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b


if __name__ == "__main__":
    Adding.run()
