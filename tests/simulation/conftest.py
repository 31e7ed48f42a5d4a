from __future__ import annotations

import sys
from pathlib import Path

# The simulated engine is the benchmark's, which is run from the repository's root.
sys.path.insert(0, str(Path(__file__).parents[2]))
