"""The network between the machines of a deployment: keys, certificates, and the mailbox."""
