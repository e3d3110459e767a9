"""Grafana dashboards as typed code: ``python -m planaria.dashboards DIR`` writes them as JSON.

One file per dashboard says what it shows; ``panels`` makes Grafana's panels of that, ``board`` lays them out and adds
what all dashboards share. Needs the Grafana Foundation SDK, which a training job does not.
"""
