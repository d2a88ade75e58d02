"""Support of the tests of pcomm.fsdp."""
