import sys
from pathlib import Path

# The benchmarks are jobs: they find their own modules beside the script, as a script does.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "jobs/bench"))
