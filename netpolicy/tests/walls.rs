//! What a sandbox can and cannot reach.

#![allow(clippy::unwrap_used)]

mod world;

use netpolicy::{Policy, Reason};
use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::time::Duration;
use world::{HOST, OTHER, SERVER, Sandbox, echo, on_a_host, serve_echo};

#[test]
fn what_is_allowed_is_reached_and_all_else_is_refused_and_reported() {
    on_a_host(|world| {
        world.echo(SERVER, 7);
        world.echo(SERVER, 8);
        world.echo(OTHER, 7);
        let network = world.network();
        let sandbox = Sandbox::new(&network, &["tcp:203.0.113.0/24:7"]);
        let mut open = sandbox.connect(SERVER, 7).unwrap();
        echo(&mut open).unwrap();
        for (address, port) in [(SERVER, 8), (OTHER, 7), (OTHER, 443)] {
            let refused = sandbox.connect(address, port).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{address}:{port}");
            let denial = sandbox.denied(|d| d.address == Some(address.into()) && d.port == port);
            assert_eq!((denial.reason, denial.protocol.as_str()), (Reason::NotAllowed, "tcp"));
        }
        assert_eq!(sandbox.member.denied_packets(), 3);
    });
}

#[test]
fn some_places_are_never_reached_whatever_a_policy_says() {
    on_a_host(|world| {
        // Servers that would answer.
        serve_echo(TcpListener::bind((HOST, 22)).unwrap());
        let network = world.network();
        let open = ["tcp:0.0.0.0/0", "udp:0.0.0.0/0"];
        let sandbox = Sandbox::new(&network, &open);
        let neighbour = Sandbox::new(&network, &open);
        let listener = neighbour.place.run(|| TcpListener::bind("0.0.0.0:80").unwrap());
        serve_echo(listener);
        let metadata = Ipv4Addr::new(169, 254, 169, 254);
        for (address, port) in [(metadata, 80), (neighbour.member.address(), 80)] {
            let refused = sandbox.connect(address, port).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{address}");
            assert_eq!(sandbox.denied(|d| d.address == Some(address.into())).reason, Reason::Never);
        }
        // An address of the host is known to the node only, which has answered by then.
        let host = sandbox.connect(HOST, 22);
        assert!(host.is_err() || matches!(host.unwrap().read(&mut [0]), Ok(0) | Err(_)));
        let denial = sandbox.denied(|d| d.address == Some(HOST.into()));
        assert_eq!((denial.reason, denial.port), (Reason::Never, 22));
        // What the node itself listens for is a name server and registries, and nothing else.
        let refused = sandbox.connect(netpolicy::GATEWAY, 22).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        for address in ["224.0.0.251", "255.255.255.255", "169.254.1.1"] {
            sandbox.place.run(|| {
                let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
                socket.set_broadcast(true).unwrap();
                socket.send_to(b"x", (address, 9)).unwrap();
            });
            let address = address.parse::<Ipv4Addr>().unwrap();
            assert_eq!(sandbox.denied(|d| d.address == Some(address.into())).reason, Reason::Never);
        }
    });
}

#[test]
fn datagrams_are_closed_until_they_are_allowed() {
    on_a_host(|world| {
        world.echo_datagrams(SERVER, 9);
        world.echo_datagrams(OTHER, 9);
        let network = world.network();
        let sandbox = Sandbox::new(&network, &["udp:203.0.113.10:9", "tcp:198.51.100.10"]);
        let send = |to: Ipv4Addr| {
            sandbox.place.run(|| {
                let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
                socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                socket.connect((to, 9)).unwrap();
                let mut buffer = [0; 16];
                let mut answers = Vec::new();
                for word in [b"one", b"two"] {
                    socket.send(word)?;
                    let length = socket.recv(&mut buffer)?;
                    answers.push(buffer[..length].to_vec());
                }
                Ok::<_, std::io::Error>(answers)
            })
        };
        assert_eq!(send(SERVER).unwrap(), [b"one", b"two"]);
        assert_eq!(send(OTHER).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert_eq!(sandbox.denied(|d| d.address == Some(OTHER.into())).protocol, "udp");
        sandbox.member.set_policy(Policy::default()).unwrap();
        assert!(send(SERVER).is_err());
    });
}

#[test]
fn another_policy_ends_open_connections_at_once() {
    on_a_host(|world| {
        world.echo(SERVER, 7);
        world.echo(OTHER, 7);
        let network = world.network();
        let sandbox = Sandbox::new(&network, &["203.0.113.10:7", "198.51.100.10:7"]);
        let mut stays = sandbox.connect(OTHER, 7).unwrap();
        let mut ends = sandbox.connect(SERVER, 7).unwrap();
        echo(&mut stays).unwrap();
        echo(&mut ends).unwrap();
        assert_eq!(sandbox.member.open_flows(), 2);
        sandbox.member.set_policy(Policy::parse(&["198.51.100.0/24"]).unwrap()).unwrap();
        assert!(ends.read(&mut [0; 1]).is_err(), "a reset");
        echo(&mut stays).unwrap();
        assert_eq!(sandbox.denied(|d| d.reason == Reason::Revoked).address, Some(SERVER.into()));
        assert!(sandbox.connect(SERVER, 7).is_err());
        sandbox.member.set_policy(Policy::parse(&["203.0.113.10:7"]).unwrap()).unwrap();
        echo(&mut sandbox.connect(SERVER, 7).unwrap()).unwrap();
        assert!(stays.read(&mut [0; 1]).is_err(), "a reset");
    });
}

#[test]
fn raw_packets_with_another_sender_and_other_protocols_go_nowhere() {
    on_a_host(|world| {
        let network = world.network();
        let sandbox = Sandbox::new(&network, &["0.0.0.0/0"]);
        let victim = Sandbox::new(&network, &["0.0.0.0/0", "udp:0.0.0.0/0"]);
        // With a right that no sandbox has.
        sandbox.place.run(|| {
            let protocol = |number: i32| Some(socket2::Protocol::from(number));
            let socket = |number| {
                let (domain, kind) = (socket2::Domain::IPV4, socket2::Type::RAW);
                socket2::Socket::new(domain, kind, protocol(number)).unwrap()
            };
            let to = SocketAddr::from((SERVER, 0)).into();
            let ping = [8, 0, 0xf7, 0xff, 0, 0, 0, 0];
            socket(1).send_to(&ping, &to).unwrap();
            socket(47).send_to(&[0; 8], &to).unwrap();
            let raw = socket(255);
            raw.set_header_included_v4(true).unwrap();
            let mut packet = vec![0x45, 0, 0, 28, 0, 1, 0, 0, 64, 17, 0, 0];
            packet.extend(victim.member.address().octets());
            packet.extend(SERVER.octets());
            packet.extend([0, 9, 0, 9, 0, 8, 0, 0]);
            raw.send_to(&packet, &to).unwrap();
        });
        assert_eq!(sandbox.denied(|d| d.protocol == "icmp").reason, Reason::Protocol);
        assert_eq!(sandbox.denied(|d| d.protocol == "47").reason, Reason::Protocol);
        assert_eq!(sandbox.denied(|d| d.protocol == "udp").reason, Reason::Spoofed);
        assert_eq!(victim.member.open_flows(), 0);
    });
}

#[test]
fn there_is_no_ipv6() {
    on_a_host(|world| {
        let network = world.network();
        let sandbox = Sandbox::new(&network, &["0.0.0.0/0"]);
        let refused = sandbox.place.run(|| std::net::TcpStream::connect("[2001:db8::1]:80"));
        assert!(refused.is_err());
        // Also for one who brings it up, with a right that no sandbox has.
        sandbox.place.run(|| {
            std::fs::write("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "0").unwrap();
            let socket = UdpSocket::bind("[::]:0").unwrap();
            let index = sys::netlink::Routes::open().unwrap().index_of("eth0").unwrap();
            let to = std::net::SocketAddrV6::new("ff02::1".parse().unwrap(), 9, 0, index);
            socket2::SockRef::from(&socket).set_multicast_if_v6(index).unwrap();
            // Its own address is not ready at once.
            for _ in 0..2000 {
                if socket.send_to(b"x", to).is_ok() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let denial = sandbox.denied(|d| d.reason == Reason::Ipv6);
        assert_eq!(denial.address, Some("ff02::1".parse().unwrap()));
    });
}

#[test]
fn connections_are_bounded_and_do_not_hang_about() {
    on_a_host(|world| {
        world.echo(SERVER, 7);
        let network = world.network();
        let sandbox = Sandbox::new(&network, &["203.0.113.10:7"]);
        let mut open: Vec<_> = (0..520).filter_map(|_| sandbox.connect(SERVER, 7).ok()).collect();
        sandbox.denied(|d| d.reason == Reason::Limit);
        assert!(sandbox.member.open_flows() <= 512);
        echo(&mut open[0]).unwrap();
        open.clear();
        for _ in 0..2000 {
            if sandbox.member.open_flows() == 0 {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("{} connections stay", sandbox.member.open_flows());
    });
}

#[test]
fn nothing_is_left_of_a_sandbox_or_a_network() {
    on_a_host(|world| {
        world.echo(SERVER, 7);
        let names = || {
            let text = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
            let lines = text.lines().skip(2).filter_map(|line| line.split(':').next());
            lines.map(|name| name.trim().to_owned()).collect::<Vec<_>>()
        };
        let before = names();
        let network = world.network();
        assert_eq!(names(), before, "the host gets no interface");
        let sandbox = Sandbox::new(&network, &["203.0.113.10:7"]);
        assert_eq!(names(), before);
        assert_eq!(sandbox.place.run(names).len(), 2);
        let mut open = sandbox.connect(SERVER, 7).unwrap();
        echo(&mut open).unwrap();
        network.detach(&sandbox.member);
        assert!(sandbox.connect(SERVER, 7).is_err());
        assert_eq!(sandbox.place.run(names), ["lo"]);
        // The next one in the same place.
        let log = std::sync::Arc::clone(&sandbox.log);
        let again = network.attach("b", None, sandbox.place.fd(), Policy::default(), log).unwrap();
        assert_ne!(again.number(), sandbox.member.number());
        // A node that is gone closes everything, and leaves nothing.
        drop(network);
        for _ in 0..2000 {
            if sandbox.place.run(names) == ["lo"] {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("an interface stays");
    });
}
