"""The MQTT bus: client, message filter, flood filter."""
