"""Runs a whole cluster as processes of this machine: `pdserve.launch.cluster.LocalCluster`."""
