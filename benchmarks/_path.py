"""Makes the repository's modules importable; every benchmark imports this first."""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, 'benchmarks', 'results')

sys.path.insert(0, ROOT)
