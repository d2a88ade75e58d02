"""Models of transformers, split over ranks by their own tensor-parallel plan."""
