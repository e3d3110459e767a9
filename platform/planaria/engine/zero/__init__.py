"""The DeepSpeed engine: ZeRO stages 0 to 3 behind the platform's own step, state and recovery."""
