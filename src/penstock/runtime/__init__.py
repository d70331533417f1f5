"""The only owner of processes, sockets and real time."""
