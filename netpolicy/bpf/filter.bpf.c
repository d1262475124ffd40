// The wall of a sandbox's interface: it sees every packet that leaves the sandbox, on the host's end of the
// cable, where no right inside the sandbox reaches it.
//
// What it lets through goes to the proxies of this node, and to nobody else: a new connection that the
// policy allows is handed to the listener that carries it on. The namespace around it has no other way out,
// so a fault here closes.

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define MAX_RULES 24
#define EVENTS_PER_SECOND 32
#define SECOND 1000000000ULL

// Why a packet was not let through. The numbers are known to `filter.rs`.
enum reason {
	NOT_ALLOWED = 1,
	NEVER = 2,
	SPOOFED = 3,
	PROTOCOL = 4,
	IPV6 = 5,
	MALFORMED = 6,
};

struct interface {
	__u32 address; // of the sandbox, as in a packet
	__u32 sandbox;
	__u64 denied;
	__u64 unreported;
	__u64 second;
	__u64 in_second;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct interface);
} interfaces SEC(".maps");

struct destination {
	__u32 prefix;
	__u32 sandbox;
	__u32 address;
};

struct rule {
	__u64 until; // monotonic nanoseconds; 0 is for ever
	__u16 first_port;
	__u16 last_port;
	__u32 protocol;
};

struct rules {
	__u64 count;
	struct rule rule[MAX_RULES];
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1 << 20);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct destination);
	__type(value, struct rules);
} allowed SEC(".maps");

// The listeners that carry on what is allowed: 0 for TCP, 1 for UDP.
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u32);
} listeners SEC(".maps");

// The node's own address on the cable, and the network of all sandboxes.
volatile const __u32 GATEWAY = 0;
volatile const __u32 SANDBOXES = 0;
volatile const __u32 SANDBOXES_MASK = 0xffffffff;

struct denial {
	__u64 unreported;
	__u32 sandbox;
	__u32 address;
	__u16 port;
	__u8 protocol;
	__u8 reason;
	__u32 source;
	__u8 address6[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} denials SEC(".maps");

static __always_inline int is_new_second(struct interface *from)
{
	__u64 second = bpf_ktime_get_ns() / SECOND;
	if (from->second == second)
		return 0;
	from->second = second;
	return 1;
}

// Says so and answers `verdict`.
static __always_inline int deny(struct interface *from, enum reason reason, __u8 protocol, __u32 address,
				__u16 port, __u32 source, const void *address6, int verdict)
{
	__sync_fetch_and_add(&from->denied, 1);
	if (is_new_second(from))
		from->in_second = 0;
	struct denial *denial = 0;
	if (from->in_second < EVENTS_PER_SECOND)
		denial = bpf_ringbuf_reserve(&denials, sizeof(*denial), 0);
	if (!denial) {
		__sync_fetch_and_add(&from->unreported, 1);
		return verdict;
	}
	from->in_second += 1;
	denial->unreported = from->unreported;
	denial->sandbox = from->sandbox;
	denial->address = address;
	denial->port = bpf_ntohs(port);
	denial->protocol = protocol;
	denial->reason = reason;
	denial->source = source;
	__builtin_memset(denial->address6, 0, 16);
	if (address6)
		__builtin_memcpy(denial->address6, address6, 16);
	from->unreported = 0;
	bpf_ringbuf_submit(denial, 0);
	return verdict;
}

static __always_inline int is_within(__u32 address, __u32 network, __u32 bits)
{
	return (bpf_ntohl(address) >> (32 - bits)) == (network >> (32 - bits));
}

static __always_inline int is_never_allowed(__u32 address)
{
	return is_within(address, 0x00000000, 8)      // this network
	       || is_within(address, 0x7f000000, 8)   // loopback
	       || is_within(address, 0xa9fe0000, 16)  // link-local, metadata services
	       || is_within(address, 0xe0000000, 3)   // multicast, reserved, broadcast
	       || address == bpf_htonl(0x646464c8) // 100.100.100.200, a metadata service
	       || (address & SANDBOXES_MASK) == SANDBOXES;
}

static __always_inline int is_allowed(__u32 sandbox, __u32 address, __u32 protocol, __u16 port)
{
	struct destination destination = { 64, sandbox, address };
	struct rules *rules = bpf_map_lookup_elem(&allowed, &destination);
	if (!rules)
		return 0;
	__u64 now = bpf_ktime_get_ns();
	for (int i = 0; i < MAX_RULES; i++) {
		if (i >= rules->count)
			break;
		struct rule *rule = &rules->rule[i];
		if (rule->protocol == protocol && port >= rule->first_port && port <= rule->last_port &&
		    (rule->until == 0 || now < rule->until))
			return 1;
	}
	return 0;
}

static __always_inline int hand_over(struct __sk_buff *packet, __u32 listener)
{
	struct bpf_sock *socket = bpf_map_lookup_elem(&listeners, &listener);
	if (!socket)
		return TC_ACT_SHOT;
	long failed = bpf_sk_assign(packet, socket, 0);
	bpf_sk_release(socket);
	return failed ? TC_ACT_SHOT : TC_ACT_OK;
}

SEC("classifier")
int from_sandbox(struct __sk_buff *packet)
{
	__u32 index = packet->ifindex;
	struct interface *from = bpf_map_lookup_elem(&interfaces, &index);
	if (!from)
		return TC_ACT_SHOT;
	bpf_skb_pull_data(packet, sizeof(struct ethhdr) + sizeof(struct ipv6hdr));
	void *data = (void *)(long)packet->data, *end = (void *)(long)packet->data_end;
	struct ethhdr *ethernet = data;
	if ((void *)(ethernet + 1) > end)
		return TC_ACT_SHOT;
	if (ethernet->h_proto == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip6 = (void *)(ethernet + 1);
		if ((void *)(ip6 + 1) > end)
			return TC_ACT_SHOT;
		// What a kernel says by itself on a new interface is nobody's attempt.
		if (ip6->nexthdr == 58 || ip6->nexthdr == 0)
			return TC_ACT_SHOT;
		return deny(from, IPV6, ip6->nexthdr, 0, 0, 0, &ip6->daddr, TC_ACT_SHOT);
	}
	if (ethernet->h_proto == bpf_htons(ETH_P_ARP))
		return TC_ACT_SHOT; // both ends know each other without asking
	if (ethernet->h_proto != bpf_htons(ETH_P_IP))
		return deny(from, PROTOCOL, 0, 0, 0, 0, 0, TC_ACT_SHOT);
	struct iphdr *ip = (void *)(ethernet + 1);
	if ((void *)(ip + 1) > end)
		return TC_ACT_SHOT;
	__u32 address = ip->daddr, source = ip->saddr;
	__u8 protocol = ip->protocol;
	if (source != from->address)
		return deny(from, SPOOFED, protocol, address, 0, source, 0, TC_ACT_SHOT);
	// Options could carry a route, and a fragment has no ports.
	if (ip->version != 4 || ip->ihl != 5 || ip->frag_off & bpf_htons(0x3fff))
		return deny(from, MALFORMED, protocol, address, 0, source, 0, TC_ACT_SHOT);
	if (protocol != IPPROTO_TCP && protocol != IPPROTO_UDP)
		return deny(from, PROTOCOL, protocol, address, 0, source, 0, TC_ACT_SHOT);
	// The ports and, for TCP, the flags.
	__u32 wanted = protocol == IPPROTO_TCP ? sizeof(struct tcphdr) : sizeof(struct udphdr);
	bpf_skb_pull_data(packet, sizeof(struct ethhdr) + sizeof(struct iphdr) + wanted);
	data = (void *)(long)packet->data;
	end = (void *)(long)packet->data_end;
	struct udphdr *ports = data + sizeof(struct ethhdr) + sizeof(struct iphdr);
	if ((void *)(ports + 1) > end)
		return deny(from, MALFORMED, protocol, address, 0, source, 0, TC_ACT_SHOT);
	__u16 port = ports->dest;
	if (protocol == IPPROTO_TCP) {
		struct tcphdr *tcp = (void *)ports;
		if ((void *)(tcp + 1) > end)
			return deny(from, MALFORMED, protocol, address, port, source, 0, TC_ACT_SHOT);
		// Of a connection that was let through, or of none: then the kernel refuses it.
		if (!tcp->syn || tcp->ack)
			return TC_ACT_OK;
	}
	if (address == GATEWAY) {
		if (port == bpf_htons(53) || (protocol == IPPROTO_TCP && port == bpf_htons(80)))
			return TC_ACT_OK;
		return deny(from, NOT_ALLOWED, protocol, address, port, source, 0, TC_ACT_OK);
	}
	// Nothing listens for what is not handed over, so that the kernel refuses it at once.
	if (is_never_allowed(address))
		return deny(from, NEVER, protocol, address, port, source, 0, TC_ACT_OK);
	if (!is_allowed(from->sandbox, address, protocol, bpf_ntohs(port)))
		return deny(from, NOT_ALLOWED, protocol, address, port, source, 0, TC_ACT_OK);
	return hand_over(packet, protocol == IPPROTO_TCP ? 0 : 1);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
