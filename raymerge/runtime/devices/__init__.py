"""Devices that workers compute on."""
