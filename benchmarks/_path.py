"""Imported first by every benchmark: makes the repository's modules importable from any folder."""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, 'benchmarks', 'results')

sys.path.insert(0, ROOT)
