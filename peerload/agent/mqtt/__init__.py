"""The MQTT bus: client, message filter, loop detector, revocations by way of the broker."""
