"""Packages live under two roots (`dilocox/`, `kernels/`), and `conf/` travels inside `dilocox`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["dilocox", "dilocox.*"]), *find_packages("kernels"), "dilocox.conf"],
    package_data={"dilocox.conf": ["**/*.yaml"]},
)
