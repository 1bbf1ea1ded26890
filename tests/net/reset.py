"""The TCP reset that a firewall answers a packet with (RFC 9293, 3.10.7.1). IPv4 without options of its own. Pure."""

import socket
import struct

_TCP = 6
_ACK, _SYN, _FIN, _RST = 0x10, 0x02, 0x01, 0x04


def reset(packet: bytes) -> bytes | None:
    """As of the packet's receiver, to its sender; None for what is not TCP, and for a reset."""
    start = (packet[0] & 15) * 4
    flags = packet[start + 13]
    if packet[9] != _TCP or flags & _RST:
        return None
    sender, receiver = packet[12:16], packet[16:20]
    ports = struct.unpack_from("!HH", packet, start)
    sequence, acknowledged = struct.unpack_from("!II", packet, start + 4)
    if flags & _ACK:
        numbers = (acknowledged, 0, _RST)
    else:
        payload = len(packet) - start - (packet[start + 12] >> 4) * 4
        end = sequence + payload + bool(flags & _SYN) + bool(flags & _FIN)
        numbers = (0, end & 0xFFFFFFFF, _RST | _ACK)
    segment = _tcp(ports[1], ports[0], *numbers, checksum=0)
    pseudo = receiver + sender + struct.pack("!HH", _TCP, len(segment))
    segment = _tcp(ports[1], ports[0], *numbers, checksum=_checksum(pseudo + segment))
    header = _ip(receiver, sender, len(segment), 0)
    return _ip(receiver, sender, len(segment), _checksum(header)) + segment


def _tcp(source: int, to: int, sequence: int, acknowledged: int, flags: int, checksum: int) -> bytes:
    return struct.pack("!HHIIBBHHH", source, to, sequence, acknowledged, 5 << 4, flags, 0, checksum, 0)


def _ip(source: bytes, to: bytes, length: int, checksum: int) -> bytes:
    return struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + length, 0, 0, 64, socket.IPPROTO_TCP, checksum, source, to)


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
