"""Domains by libvirt, for sites whose hosts are run by it: driver.py is the `Hypervisor`, xml.py what it asks for,
link.py the connection with its deadlines, daemon.py the watch on libvirt's daemon, domain.py a domain while it lives."""
