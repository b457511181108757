"""Formats and scaling as tables and pictures: what `megatron-fp8 formats` shows, and what a lab builds on."""
