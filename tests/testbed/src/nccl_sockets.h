// Loopback sockets whose every wait can be ended by a bell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace bed::nccl {

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket();
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Once rung it stays rung: whoever waits on it, now or later, wakes.
class Bell {
 public:
  Bell();
  void ring() const;
  bool rung() const;
  int fd() const { return event_.fd(); }

 private:
  Socket event_;
};

// An empty socket, with errno set, when the system refuses.
Socket listen_local(uint16_t* port);
Socket dial_local(uint16_t port);

enum class Io { done, closed, ended };  // ended: the bell rang

Io receive(const Socket& socket, void* into, size_t size, const Bell& bell);
Io transmit(const Socket& socket, const void* from, size_t size, const Bell& bell);

// Waits for a connection. `closed`: `watched` has something to say first (a message or its end).
Io accept_local(const Socket& listener, const Socket& watched, const Bell& bell, Socket* accepted);

}  // namespace bed::nccl
