"""What a sharded model moves, holds and could reach: imported only when it is asked for."""
