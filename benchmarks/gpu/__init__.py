"""What can only be measured on a CUDA GPU: `python benchmarks/gpu/run.py`, or `make gpu`."""
