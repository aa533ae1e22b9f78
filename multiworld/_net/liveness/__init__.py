"""The watchdog's sockets, and the helper process that reports on this one."""
