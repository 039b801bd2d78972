"""Eight fake CPU devices for JAX, the repository root on the path, and the folder of reference values."""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def golden_dir():
    """golden_dir("pythoncoder") is the folder of that area's reference values, under GOLDEN_DIR or tests/golden."""
    top = Path(os.environ.get("GOLDEN_DIR", Path(__file__).parent / "golden"))

    def find(area):
        assert (top / area).is_dir(), f"no reference values in {top / area}"
        return top / area

    return find
