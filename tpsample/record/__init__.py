"""A step in a file, to be sampled again offline. See `tpsample.record.format`."""

from tpsample.record.format import FullHead, LoadHead, write_record
from tpsample.record.verify import RowVerdict, verify_record

__all__ = ["FullHead", "LoadHead", "RowVerdict", "verify_record", "write_record"]
