"""A strict functional emulator of the PTX that the sm_90a kernels compile to; for tests only.

Written from the public PTX ISA; each module names the chapters it implements, numbered as in
PTX ISA 8.8.  `emulate` runs one launch.
"""
from .errors import Fault
from .launch import emulate
from .tensormap import TensorMap

__all__ = ["Fault", "TensorMap", "emulate"]
