"""Codecs, outer steps, wire messages and checksums of dilocox; needs torch alone. See kernels/README.md."""
