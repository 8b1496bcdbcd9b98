"""Domains by libvirt, for sites whose hosts are run by it: driver.py is the `Hypervisor`, xml.py what it asks for,
connection.py the connection with its deadlines, holder.py the process that holds it, domain.py a domain while it lives."""
