"""What benchmarks of several packages share; on the path of `pcomm bench`, in no wheel."""
