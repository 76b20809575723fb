"""Folders, each a domain: see ``divergence.domain``. Nothing outside names one."""
