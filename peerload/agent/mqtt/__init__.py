"""The MQTT bus: client, message filter, loop detector."""
