"""Plays NVIDIA Apex 25.04: it records each call in `calls`, and trains in float32."""

calls: list[tuple] = []
