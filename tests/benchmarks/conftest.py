"""The benchmarks are programs, no package: their modules are found in their folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
