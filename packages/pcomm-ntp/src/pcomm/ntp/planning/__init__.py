"""What a job with failed ranks does, decided from integers alone: no torch, no communication."""
