"""Lets the tests import what only a server's stub can otherwise."""

from __future__ import annotations

import sys

from tests.triton import fake_pb_utils

sys.modules.setdefault("triton_python_backend_utils", fake_pb_utils)
