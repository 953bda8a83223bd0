"""Benchmarks: always ratios of one run."""
