#include "nccl_sockets.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

namespace bed::nccl {
namespace {

sockaddr_in loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

void no_delay(const Socket& socket) {
  int one = 1;
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

// Waits for one of two sockets (the second may be absent) or the bell; says which, in that order of urgency.
enum class Ready { bell, second, first };
Ready wait_for(const Socket& first, short events, const Socket* second, const Bell& bell) {
  pollfd fds[3] = {{bell.fd(), POLLIN, 0}, {second ? second->fd() : -1, POLLIN, 0}, {first.fd(), events, 0}};
  while (poll(fds, 3, -1) < 0 && errno == EINTR) {
  }
  return fds[0].revents ? Ready::bell : fds[1].revents ? Ready::second : Ready::first;
}

bool again(ssize_t moved) { return moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR); }

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

Bell::Bell() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void Bell::ring() const {
  uint64_t one = 1;
  // It can only fail when it was rung 2^64 times.
  [[maybe_unused]] ssize_t written = write(event_.fd(), &one, sizeof one);
}

bool Bell::rung() const {
  pollfd fd{event_.fd(), POLLIN, 0};
  return poll(&fd, 1, 0) > 0;
}

Socket listen_local(uint16_t* port) {
  Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = loopback(0);
  socklen_t size = sizeof address;
  if (!socket || bind(socket.fd(), reinterpret_cast<sockaddr*>(&address), size) || listen(socket.fd(), 1024) ||
      getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &size))
    return Socket();
  *port = ntohs(address.sin_port);
  return socket;
}

Socket dial_local(uint16_t port) {
  Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = loopback(port);
  // On loopback a connect is answered by the kernel: it does not wait for the peer's process.
  if (!socket || connect(socket.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address)) return Socket();
  no_delay(socket);
  return socket;
}

Io receive(const Socket& socket, void* into, size_t size, const Bell& bell) {
  for (auto* at = static_cast<char*>(into); size;) {
    if (wait_for(socket, POLLIN, nullptr, bell) == Ready::bell) return Io::ended;
    ssize_t moved = recv(socket.fd(), at, size, MSG_DONTWAIT);
    if (again(moved)) continue;
    if (moved <= 0) return Io::closed;
    at += moved;
    size -= moved;
  }
  return Io::done;
}

Io transmit(const Socket& socket, const void* from, size_t size, const Bell& bell) {
  for (auto* at = static_cast<const char*>(from); size;) {
    if (wait_for(socket, POLLOUT, nullptr, bell) == Ready::bell) return Io::ended;
    ssize_t moved = send(socket.fd(), at, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (again(moved)) continue;
    if (moved <= 0) return Io::closed;
    at += moved;
    size -= moved;
  }
  return Io::done;
}

Io accept_local(const Socket& listener, const Socket& watched, const Bell& bell, Socket* accepted) {
  for (;;) {
    switch (wait_for(listener, POLLIN, watched ? &watched : nullptr, bell)) {
      case Ready::bell:
        return Io::ended;
      case Ready::second:
        return Io::closed;
      case Ready::first:
        break;
    }
    *accepted = Socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    if (*accepted) {
      no_delay(*accepted);
      return Io::done;
    }
    if (errno != EINTR && errno != EAGAIN && errno != ECONNABORTED) return Io::closed;
  }
}

}  // namespace bed::nccl
