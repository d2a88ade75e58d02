"""The control plane: how ranks agree, who they are, and which generation of them counts."""
